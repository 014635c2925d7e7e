"""What a decoder will cost on TPUs that are not there: compiled for them, counted in the programs, and modelled."""
