package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/device"
)

// A reading holds the sensor values of a device. Values without a sensor are
// omitted.
type reading struct {
	Utilization    *int             `json:"utilization_percent,omitempty"`
	MemoryActivity *int             `json:"memory_activity_percent,omitempty"`
	Temperature    *int             `json:"temperature_celsius,omitempty"`
	PowerDraw      *int             `json:"power_draw_milliwatts,omitempty"`
	ClockRate      *int             `json:"clock_rate_mhz,omitempty"`
	MemoryUsed     *uint64          `json:"memory_used_bytes,omitempty"`
	NVLinks        []bool           `json:"nvlinks_up,omitempty"`
	Processes      []device.Process `json:"processes,omitempty"`
	Missing        string           `json:"missing,omitempty"` // why a value is omitted
}

// read queries all sensors of a device. A missing sensor is not an error.
func read(d *device.Device) (*reading, error) {
	r := new(reading)
	var wrong error
	note := func(err error) bool {
		switch {
		case err == nil:
		case !errors.Is(err, errors.ErrUnsupported):
			wrong = errors.Join(wrong, err)
		case r.Missing == "":
			r.Missing = err.Error()
		}
		return err == nil
	}
	for _, s := range []struct {
		to   **int
		from func() (int, error)
	}{
		{&r.Utilization, d.Utilization}, {&r.MemoryActivity, d.MemoryActivity}, {&r.Temperature, d.Temperature},
		{&r.PowerDraw, d.PowerDraw}, {&r.ClockRate, d.ClockRate},
	} {
		if v, err := s.from(); note(err) {
			*s.to = &v
		}
	}
	if v, err := d.MemoryUsed(); note(err) {
		r.MemoryUsed = &v
	}
	var err error
	r.NVLinks, err = d.NVLinks()
	note(err)
	r.Processes, err = d.Processes()
	note(err)
	return r, wrong
}

// String returns one line, or "" if no value is known.
func (r *reading) String() string {
	var parts []string
	add := func(format string, v *int) {
		if v != nil {
			parts = append(parts, fmt.Sprintf(format, *v))
		}
	}
	add("busy %d%%", r.Utilization)
	add("memory active %d%%", r.MemoryActivity)
	add("%d °C", r.Temperature)
	if r.PowerDraw != nil {
		parts = append(parts, fmt.Sprintf("%.0f W", float64(*r.PowerDraw)/1000))
	}
	add("%d MHz", r.ClockRate)
	if r.MemoryUsed != nil {
		parts = append(parts, mib(*r.MemoryUsed)+" used")
	}
	if len(r.NVLinks) > 0 {
		up := 0
		for _, u := range r.NVLinks {
			if u {
				up++
			}
		}
		parts = append(parts, fmt.Sprintf("%d of %d NVLinks up", up, len(r.NVLinks)))
	}
	if r.MemoryUsed != nil && r.Processes == nil {
		parts = append(parts, "no processes are running")
	}
	for _, p := range r.Processes {
		parts = append(parts, fmt.Sprintf("process %d uses %s", p.PID, mib(p.MemoryBytes)))
	}
	return strings.Join(parts, ", ")
}

func mib(bytes uint64) string { return fmt.Sprintf("%.0f MiB", float64(bytes)/(1<<20)) }
