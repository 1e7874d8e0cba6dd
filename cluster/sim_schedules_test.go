package cluster

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// simSchedules are schedules that have found faults, shrunk. The seed is that of the random job.
var simSchedules = []struct{ name, text string }{
	{"a connected host without workers counted although it had not answered", `
job seed=5000945 hosts=4 late=0 least=1 local=1 seeds=1 restarts=0 pace=322703 latency=57µs lost-after=1s
+1.51s freeze a - 550.259ms 0s
+1.686839s split a ^a 1.046114s 0s
+650ms worker b - 0s 1ns`},
	{"a connected host without workers counted, and packets were lost in one direction", `
job seed=4005481 hosts=5 late=0 least=1 local=1 seeds=1 restarts=0 pace=734015 latency=1.305ms lost-after=1s
+2.241s worker d - 0s 1ns
+2.662s cut ab ^ab 0s 0s`},
	{"a host that was asked to leave counted as ended before it knew", `
job seed=4002840 hosts=3 late=0 least=1 local=1 seeds=2 restarts=0 pace=794028 latency=303µs lost-after=1s
propose1+14µs split a ^a 2.823571s 0s
+17.053ms drain c - 0s 0s`},
	{"several hosts were asked to leave", `
job seed=4000110 hosts=5 late=0 least=1 local=1 seeds=1 restarts=0 pace=291584 latency=398µs lost-after=1s
+2.613s drain a - 0s 0s
+2.75s split e ^e 1.36571s 0s
+2.925588s drain c - 0s 0s
+2.926877s split bce ^bce 1.539479s 0s
commit2+42µs heal - - 0s 0s
commit3+12µs drain d - 0s 0s`},
	{"a reset and silence proved an end", `
job seed=5002528 hosts=3 late=0 least=1 local=1 seeds=1 restarts=0 pace=674608 latency=2.532ms lost-after=3s
+7.379s firewall a ^a 3.365695s 0s`},
	{"a frozen machine reset its connections", `
job seed=4000793 hosts=3 late=0 least=1 local=2 seeds=3 restarts=0 pace=851979 latency=102µs lost-after=3s
+979.598ms freeze a - 6.629424s 0s`},
	{"a coordinator that others had replaced won a host back", `
job seed=5001808 hosts=4 late=0 least=1 local=1 seeds=2 restarts=2 pace=864459 latency=3.991ms lost-after=1s
+1.782s split a ^a 2.603893s 0s
commit2+6µs heal - - 0s 0s
commit2+7µs split * c 0s 0s`},
	{"a coordinator that others had replaced won a host back, as the network healed", `
job seed=3003763 hosts=4 late=0 least=1 local=1 seeds=3 restarts=1 pace=683613 latency=667µs lost-after=1s
+868ms split a ^a 1.359507s 0s
commit2+40µs split * d 0s 0s`},
}

func TestSimulatedSchedules(t *testing.T) {
	for _, c := range simSchedules {
		t.Run(c.name, func(t *testing.T) {
			s, err := parseSchedule(c.text)
			require.NoError(t, err)
			if r, bad := fails(t, s, 2); bad {
				require.FailNow(t, r.violation, strings.Join(r.events, "\n"))
			}
		})
	}
}

// The text of a schedule replays it.
func TestScheduleText(t *testing.T) {
	for seed := range uint64(1000) {
		s := randomSchedule(seed)
		again, err := parseSchedule(s.String())
		require.NoError(t, err)
		require.Equal(t, s, again)
	}
	for _, bad := range []string{"job hosts=x", "job horses=3", "+1s split a", "soon split a b 0s 0s", "+1s split a b 0 x"} {
		_, err := parseSchedule(bad)
		require.Error(t, err, bad)
	}
}
