package amp

import (
	"math"

	"github.com/gochorus/chorus/stream"
)

// A State is torch's state_dict of a scaler, also as JSON.
type State struct {
	Scale          float64 `json:"scale"`
	GrowthFactor   float64 `json:"growth_factor"`
	BackoffFactor  float64 `json:"backoff_factor"`
	GrowthInterval int     `json:"growth_interval"`
	GrowthTracker  int     `json:"_growth_tracker"` // updates without infinities in a row
}

// State waits for the operations that are enqueued on s and returns the state. The state of a
// disabled scaler is the zero State.
func (sc *Scaler) State(s *stream.Stream) (State, error) {
	if _, err := sc.enter("state", s); err != nil || sc.cfg.Disabled {
		return State{}, err
	}
	scale, tracker := make([]float32, 1), make([]int32, 1)
	if err := sc.scale.CopyTo(s, scale); err != nil {
		return State{}, err
	}
	if err := sc.tracker.CopyTo(s, tracker); err != nil {
		return State{}, err
	}
	c := &sc.cfg
	return State{float64(scale[0]), c.GrowthFactor, c.BackoffFactor, c.GrowthInterval, int(tracker[0])}, nil
}

// LoadState enqueues on s the state of another scaler. A disabled scaler ignores it. The zero
// State, which a disabled scaler has saved, is an error.
func (sc *Scaler) LoadState(s *stream.Stream, from State) error {
	const op = "load state"
	if _, err := sc.enter(op, s); err != nil || sc.cfg.Disabled {
		return err
	}
	if from == (State{}) {
		return refuse(op, "the state is empty: a disabled scaler may have saved it")
	}
	c := ScalerConfig{InitScale: max(from.Scale, math.SmallestNonzeroFloat32), GrowthFactor: from.GrowthFactor, BackoffFactor: from.BackoffFactor, GrowthInterval: from.GrowthInterval}
	if err := c.check(op); err != nil {
		return err
	}
	if from.GrowthTracker < 0 || from.GrowthTracker > math.MaxInt32 {
		return refuse(op, "growth tracker %d: want 0 or more", from.GrowthTracker)
	}
	if err := sc.put(op, s, from.Scale, int32(from.GrowthTracker)); err != nil {
		return err
	}
	sc.cfg = c
	return nil
}
