"""Ray: slots of nodes, an agent a node, and gangs of fresh rank processes."""
