"""labgrid strategies: how a bench gets into the state that its tests need."""
