// Package route chooses the backend of each collective, by a rule or by measured times, and
// executes the collective by Chorus kernels, windows or copy engines if it does not choose NCCL.
package route

import "fmt"

// A Strategy is a comm.Strategy. Package comm documents the strategies.
type Strategy uint8

// The strategies.
const (
	ByEnvironment Strategy = iota
	NCCLOnly
	OwnKernels
	OneShot
	TwoShotPackets
	TwoShot
	TwoShotLines
	Windows
	CopyEngines
	Tuned
	NumStrategies
)

// Names has the names that CHORUS_COMM_STRATEGY has for the strategies.
var Names = [NumStrategies]string{
	ByEnvironment: "by environment", NCCLOnly: "nccl", OwnKernels: "own", OneShot: "one-shot",
	TwoShotPackets: "two-shot-packets", TwoShot: "two-shot", TwoShotLines: "two-shot-lines", Windows: "windows", CopyEngines: "copy-engines", Tuned: "tuned",
}

// String returns the name that CHORUS_COMM_STRATEGY has for s.
func (s Strategy) String() string {
	if s < NumStrategies {
		return Names[s]
	}
	return fmt.Sprintf("Strategy(%d)", uint8(s))
}

// ParseStrategy returns the strategy with the given name.
func ParseStrategy(name string) (Strategy, error) {
	for s := NCCLOnly; s < NumStrategies; s++ {
		if Names[s] == name {
			return s, nil
		}
	}
	return 0, fmt.Errorf("there is no strategy %q: want one of %v", name, Names[NCCLOnly:])
}

// MarshalText implements encoding.TextMarshaler.
func (s Strategy) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Strategy) UnmarshalText(text []byte) (err error) {
	*s, err = ParseStrategy(string(text))
	return err
}

// Algorithm reports whether s is one algorithm of Chorus kernels for all-reduces.
func (s Strategy) Algorithm() bool { return s >= OneShot && s <= TwoShotLines }
