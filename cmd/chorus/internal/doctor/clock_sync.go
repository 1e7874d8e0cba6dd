package doctor

var clockSync = &Check{
	ID: "clock-sync", Scope: ScopeHost, Source: "adjtimex",
	Hazard: "The clock of the host is not synchronized, so logs of hosts do not match.",
	Run: one(func(h *Host) Result {
		ok, err := h.ClockStatus()
		switch {
		case err != nil:
			return unread(err)
		case !ok:
			return warn("not synchronized", "synchronized", "times in logs and traces of several hosts do not match", "start chronyd or systemd-timesyncd")
		}
		return pass("synchronized", "synchronized")
	}),
}
