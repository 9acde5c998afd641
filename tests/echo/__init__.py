"""An app with one consumer, which writes the numbers that it gets into a file."""
