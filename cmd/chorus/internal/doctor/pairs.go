package doctor

var pairs = &Check{
	ID: "pairs", Scope: ScopeLink, Source: "chorus perf pairs",
	Hazard:   "Copies between two GPUs are slower than between the others.",
	Measures: true,
	Run: one(func(h *Host) Result {
		return judge(h, func(m *Measured) Speed { return m.Pairs }, "all pairs alike", "collectives run at the speed of the slowest pair",
			"check the links of the named GPUs: chorus doctor --only nvlink,pcie,iommu-acs")
	}),
}

// judge converts the verdict of a benchmark.
func judge(h *Host, which func(*Measured) Speed, want, cause, cure string) Result {
	if h.Measured == nil {
		return unknown("not measured")
	}
	switch s := which(h.Measured); {
	case s.Missing != "":
		return unknown(s.Missing)
	case s.OK:
		return pass(s.Reason, want)
	default:
		return fail(s.Reason, want, cause, cure)
	}
}
