"""The controller of a store: all metadata, no payload."""
