"""Image tools: zoom, rotate, flip, enhance, draw and measure, and a code interpreter that shows images."""
