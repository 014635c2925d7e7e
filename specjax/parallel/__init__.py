"""The same functions on many devices: mesh, layout, specs, the drivers and the start of several processes."""
