"""Starting and ending the processes of a store."""
