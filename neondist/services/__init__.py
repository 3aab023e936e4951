"""Services of a job whose workers come and go: parameter servers, and the layer over which services are called."""
