"""The words of a run: frozen, typed objects made from YAML and dotted overrides."""
