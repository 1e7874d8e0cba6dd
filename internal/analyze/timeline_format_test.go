package analyze

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// chromeTrace is what a reader of the format sees.
type chromeTrace struct {
	Info struct {
		World int `json:"world_size"`
	} `json:"distributedInfo"`
	Events []chromeEvent `json:"traceEvents"`
}

type chromeEvent struct {
	Phase    string         `json:"ph"`
	Name     string         `json:"name"`
	Category string         `json:"cat"`
	PID      *int           `json:"pid"`
	TID      *int           `json:"tid"`
	Time     *float64       `json:"ts"`
	Duration *float64       `json:"dur"`
	ID       string         `json:"id"`
	Bind     string         `json:"bp"`
	Args     map[string]any `json:"args"`
}

// trace returns the merged file of a job, whose format it has checked.
func trace(t *testing.T, j *Timeline) *chromeTrace {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, j.WriteTrace(&b))
	var c chromeTrace
	require.NoError(t, json.Unmarshal(b.Bytes(), &c), b.String())
	require.NoError(t, c.check())
	return &c
}

// ns converts microseconds, which have three decimals.
func ns(us float64) int64 { return int64(math.Round(us * 1000)) }

type timelinePlace struct{ pid, tid int }

// check tells whether the trace follows the rules of Chrome's format that Perfetto needs.
func (c *chromeTrace) check() error {
	slicesOf, async, flows := map[timelinePlace][]interval{}, map[string]int{}, map[string][]chromeEvent{}
	named := map[timelinePlace]bool{}
	for _, e := range c.Events {
		if e.PID == nil || e.TID == nil || e.Name == "" {
			return fmt.Errorf("an event without pid, tid or name: %+v", e)
		}
		at := timelinePlace{*e.PID, *e.TID}
		if e.Phase != "M" && (e.Time == nil || *e.Time < 0) {
			return fmt.Errorf("an event without a time: %+v", e)
		}
		switch e.Phase {
		case "M":
			named[at] = named[at] || e.Name == "thread_name" && e.Args["name"] != ""
		case "X":
			if e.Duration == nil || *e.Duration < 0 {
				return fmt.Errorf("a slice without a duration: %+v", e)
			}
			slicesOf[at] = append(slicesOf[at], interval{ns(*e.Time), ns(*e.Time) + ns(*e.Duration)})
		case "b", "e":
			key := fmt.Sprint(*e.PID, e.Category, e.ID)
			if async[key] += map[string]int{"b": 1, "e": -1}[e.Phase]; e.ID == "" || async[key] < 0 || async[key] > 1 {
				return fmt.Errorf("a pair of b and e is wrong: %+v", e)
			}
		case "s", "f":
			flows[e.Category+e.Name+e.ID] = append(flows[e.Category+e.Name+e.ID], e)
		case "i", "C":
		default:
			return fmt.Errorf("unknown phase: %+v", e)
		}
	}
	for key, n := range async {
		if n != 0 {
			return fmt.Errorf("%s has no end", key)
		}
	}
	for at, list := range slicesOf {
		if !named[at] {
			return fmt.Errorf("thread %v has no name", at)
		}
		if err := nests(list); err != nil {
			return fmt.Errorf("thread %v: %w", at, err)
		}
	}
	return checkFlows(flows, slicesOf)
}

// nests reports slices of a thread that overlap without one containing the other.
func nests(list []interval) error {
	for i, a := range list {
		for _, b := range list[:i] {
			disjoint := a.to <= b.from || b.to <= a.from
			within := a.from >= b.from && a.to <= b.to || b.from >= a.from && b.to <= a.to
			if !disjoint && !within {
				return fmt.Errorf("%v and %v do not nest", a, b)
			}
		}
	}
	return nil
}

func checkFlows(flows map[string][]chromeEvent, slicesOf map[timelinePlace][]interval) error {
	for key, pair := range flows {
		if len(pair) != 2 || pair[0].Phase != "s" || pair[1].Phase != "f" || pair[1].Bind != "e" || *pair[1].Time < *pair[0].Time {
			return fmt.Errorf("the flow %s is not one s before one f with bp e: %+v", key, pair)
		}
		for _, e := range pair {
			at := ns(*e.Time)
			if !slices.ContainsFunc(slicesOf[timelinePlace{*e.PID, *e.TID}], func(x interval) bool { return x.from <= at && at < x.to }) {
				return fmt.Errorf("the flow %s has no slice at %d ns", key, at)
			}
		}
	}
	return nil
}

// TestValidator checks that the validator finds violations of each rule.
func TestValidator(t *testing.T) {
	const names = `{"ph":"M","name":"thread_name","pid":1,"tid":2,"args":{"name":"s"}},`
	for want, events := range map[string]string{
		"":                   names + `{"ph":"X","name":"a","pid":1,"tid":2,"ts":0,"dur":4},{"ph":"X","name":"b","pid":1,"tid":2,"ts":1,"dur":3}`,
		"do not nest":        names + `{"ph":"X","name":"a","pid":1,"tid":2,"ts":0,"dur":4},{"ph":"X","name":"b","pid":1,"tid":2,"ts":1,"dur":4}`,
		"has no name":        `{"ph":"X","name":"a","pid":1,"tid":2,"ts":0,"dur":4}`,
		"without a duration": names + `{"ph":"X","name":"a","pid":1,"tid":2,"ts":0}`,
		"without a time":     names + `{"ph":"X","name":"a","pid":1,"tid":2,"dur":1}`,
		"without pid":        `{"ph":"X","name":"a","tid":2,"ts":0,"dur":1}`,
		"has no end":         `{"ph":"b","name":"a","cat":"r","id":"1","pid":1,"tid":0,"ts":0}`,
		"pair of b and e":    `{"ph":"e","name":"a","cat":"r","id":"1","pid":1,"tid":0,"ts":0}`,
		"is not one s":       `{"ph":"s","name":"a","cat":"r","id":"1","pid":1,"tid":0,"ts":0}`,
		"has no slice": names + `{"ph":"X","name":"a","pid":1,"tid":2,"ts":0,"dur":4},{"ph":"s","name":"a","cat":"r","id":"1","pid":1,"tid":2,"ts":0},
			{"ph":"f","bp":"e","name":"a","cat":"r","id":"1","pid":1,"tid":2,"ts":9}`,
		"unknown phase": `{"ph":"Q","name":"a","pid":1,"tid":0,"ts":0}`,
	} {
		var c chromeTrace
		require.NoError(t, json.Unmarshal([]byte(`{"traceEvents":[`+events+`]}`), &c))
		if err := c.check(); want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, want)
		}
	}
}
