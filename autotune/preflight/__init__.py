"""What a config will take, before it is tried: memory and step time in closed form."""
