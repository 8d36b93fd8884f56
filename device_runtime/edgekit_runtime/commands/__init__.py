"""The commands of `edgekit-device`, one file each. A command imports what it needs when it runs."""
