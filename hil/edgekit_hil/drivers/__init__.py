"""labgrid drivers that labgrid lacks. An environment file lists their modules in `imports`."""
