"""`reward-kit view`: the pages of a folder's runs, served on this machine alone and live while runs go on."""
