"""Files of a checkpoint: read by position and in parallel, JSON read strictly, links and foreign files told apart."""
