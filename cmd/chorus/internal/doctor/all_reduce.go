package doctor

var allReduce = &Check{
	ID: "all-reduce", Scope: ScopeLink, Source: "chorus perf all_reduce",
	Hazard:   "An all-reduce over all GPUs is slow, or has wrong results.",
	Measures: true,
	Run: one(func(h *Host) Result {
		return judge(h, func(m *Measured) Speed { return m.AllReduce }, "correct, with the usual part of the link's bandwidth", "training is slower, or its results are wrong",
			"find the slow link: chorus doctor --measure --only pairs")
	}),
}
