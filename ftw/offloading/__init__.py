"""Tables that are on the GPU already go to host memory."""
