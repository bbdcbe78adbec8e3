"""DistributedDataParallel: `attach` and `wrap`, the communication hook, the wire that they return, plain all-reduces."""
