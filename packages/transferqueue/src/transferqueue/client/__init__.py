"""What a program that uses a store holds in its hands."""
