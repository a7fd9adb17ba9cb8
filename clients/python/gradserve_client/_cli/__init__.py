"""The commands of `gradserve-client`."""
