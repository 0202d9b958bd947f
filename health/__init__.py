"""Who is what, who is fit, what to do when one dies: the judgement on the nodes of a cluster, for whoever carries."""
