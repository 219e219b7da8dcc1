"""Image tools: zoom, turn, mirror, enhance, draw and measure, and a code interpreter that shows images."""
