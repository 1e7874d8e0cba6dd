package doctor

import (
	"fmt"
	"time"
)

var clockSkew = &Check{
	ID: "clock-skew", Scope: ScopeJob, Source: "clocks of the hosts, exchanged through the job's store",
	Hazard:  "The clocks of the hosts differ, so their logs and traces do not match.",
	compare: compareClocks,
}

// Differences between clocks.
const (
	noticedSkew = 100 * time.Millisecond
	mostSkew    = 5 * time.Second
)

func compareClocks(hosts []*Facts) []Result {
	const want, cause, cure = "less than 100ms", "times in logs and traces of the hosts do not match", "start chronyd on all hosts"
	worst, host := time.Duration(0), ""
	for i, f := range hosts {
		switch {
		case i == 0: // the host of rank 0 has no skew
			continue
		case f.Skew == nil && f.Broken != "":
			return []Result{unknown("host " + f.Host + ": " + f.Broken)}
		case f.Skew == nil:
			return []Result{unknown("host " + f.Host + " did not measure its clock")}
		}
		// A difference within the error of the measurement is not proven.
		if sure := max(f.Skew.Offset.Abs()-f.Skew.Trip/2, 0); sure >= worst {
			worst, host = sure, f.Host
		}
	}
	found := fmt.Sprintf("the clock of host %s differs by %v or more", host, worst.Round(time.Millisecond))
	switch {
	case worst > mostSkew:
		return []Result{fail(found, want, cause+", and certificates and leases may be refused", cure)}
	case worst > noticedSkew:
		return []Result{warn(found, want, cause, cure)}
	}
	return []Result{pass("the largest proven difference is "+worst.Round(time.Millisecond).String(), want)}
}
