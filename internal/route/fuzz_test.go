package route

import "testing"

// FuzzTunings reads what somebody may have written for a tuning.
func FuzzTunings(f *testing.F) {
	f.Add([]byte(`{"form": 2, "tunings": [{"for": {"gpu": "x", "ranks": 2, "hosts": 1}, "choices": [{"operation": "all-reduce", "type": "float32", "reduction": "sum", "bytes": 4, "times": [{"strategy": "own", "us": 1}]}]}]}`))
	f.Add([]byte(`{"form": 2, "tunings": [null]}`))
	f.Add([]byte(`{"form": 3, "leaves": []}{}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		tunings, err := parseTunings(b)
		if err != nil {
			return
		}
		for _, x := range tunings.Tunings {
			_ = Fits(x, x.For)
			_, _ = IndexOf(x)
		}
	})
}
