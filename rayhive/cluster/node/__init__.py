"""Node agents and their tools: operations on the processes, links and disk of one node."""
