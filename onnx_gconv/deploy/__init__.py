"""What a device measured: timing.json, starting runners here or over ssh, tables of costs, and models as targets read them."""
