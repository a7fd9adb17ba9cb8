"""The `gradserve` command and its checks before the start."""
