"""The programs `nestdata` and `nestmodel`, and what their commands print. In the repository, the folder is `cli/`."""
