package doctor

var pinned = &Check{
	ID: "pinned", Scope: ScopeHost, Source: "cuMemHostAlloc of 64 MiB and of CHORUS_GDS_PINNED",
	Hazard:   "The host cannot pin the memory that transfers need.",
	Measures: true,
	Run: one(func(h *Host) Result {
		return judge(h, func(m *Measured) Speed { return m.Pinned }, "64 MiB, and CHORUS_GDS_PINNED", "copies and checkpoints fail or are slow",
			"raise the memory limit of the container, or lower CHORUS_GDS_PINNED")
	}),
}
