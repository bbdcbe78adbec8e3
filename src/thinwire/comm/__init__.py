"""Communication between ranks: worlds, collectives, process groups and their teardown. Independent of gradients."""
