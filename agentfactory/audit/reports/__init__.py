"""The forms of an audit's report: text, JSON and one HTML file."""
