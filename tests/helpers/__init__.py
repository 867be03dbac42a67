"""What several test files share: small models, inputs, ways to run them."""
