"""What a site keeps and what a coordinator asks, as plain Python, for arithmetic by hand."""

from types import SimpleNamespace


class Groups(dict):
    """A site's state, of groups by their names."""

    def group(self, name):
        return self.get(name, {})

    def put(self, name, tensors):
        self[name] = dict(tensors)


class Coordinator(SimpleNamespace):
    """A federation of two sites whose replies are written down, one list for each round."""

    sites = ("a", "b")

    def state(self, **given):
        self.kept = SimpleNamespace(**given)
        return self.kept

    def rounds(self, count, state):
        return range(1, count + 1)

    def ask_all(self, operation, **given):
        self.asked = [*getattr(self, "asked", []), (operation, given)]
        return self.replies[len(self.asked) - 1]

    def evaluate(self, weights):
        self.scored = [*getattr(self, "scored", []), weights]
