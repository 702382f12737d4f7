"""verifiers (v1): episodes as traces and back, our tasks as tasksets, and its tasksets as samples and rewards."""
