from chapters.exercises.e23_early_hook import Early


def first_early(log, buckets):
    for place, (kind, bucket) in enumerate(log):
        if kind == "send":
            for later, name in log[place:]:
                if later == "gradient" and name in buckets[bucket]:
                    return bucket, name
    return None


class Mended(Early):
    def begin(self, uses):
        super().begin(uses)
        self.left = dict(uses)
        self.missing = [{name for name in sizes if uses[name]} for sizes in self.buckets]
        self.send_complete()

    def contribution(self, name, gradient):
        self.views[name] += gradient
        self.left[name] -= 1
        if self.left[name] == 0:
            self.missing[self.bucket_of[name]].discard(name)
        self.send_complete()
