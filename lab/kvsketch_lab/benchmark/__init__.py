"""Speed, measured next to the strongest alternative. Every number is kept as a record that says where it came from."""
