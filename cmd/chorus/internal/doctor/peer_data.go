package doctor

var peerData = &Check{
	ID: "peer-data", Scope: ScopeLink, Source: "copies between all pairs of GPUs, as CHORUS_P2P=auto tests them",
	Hazard:   "Direct copies between two GPUs bring wrong data.",
	Measures: true,
	Run: one(func(h *Host) Result {
		return judge(h, func(m *Measured) Speed { return m.Peers }, "right data", "programs that use peer access compute with wrong data",
			"see the check iommu-acs; until then CHORUS_P2P=off and NCCL_P2P_DISABLE=1")
	}),
}
