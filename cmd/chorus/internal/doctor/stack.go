package doctor

var stack = &Check{
	ID: "stack", Scope: ScopeHost, Source: "/proc/self/limits",
	Hazard: "An unlimited stack gives NCCL's threads small stacks.",
	Run: one(func(h *Host) Result {
		soft, _, err := h.limit("Max stack size")
		switch {
		case err != nil:
			return unread(err)
		case soft == noLimit:
			return warn("unlimited", "8 MiB", "the C library then gives new threads 2 MiB, which NCCL may exceed", "ulimit -s 8192")
		}
		return pass(limitText(soft), "a limit")
	}),
}
