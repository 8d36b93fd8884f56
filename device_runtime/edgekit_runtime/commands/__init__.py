"""The commands of `edgekit-device`, one file each; what a command needs is imported when it runs."""
