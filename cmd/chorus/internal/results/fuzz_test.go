package results

import (
	"io"
	"strings"
	"testing"
)

// FuzzReadReport reads what somebody may have written for a baseline.
func FuzzReadReport(f *testing.F) {
	f.Add(`{"form": 1, "rows": [{"operation": "all_reduce", "bytes": 4, "out_of_place": {"time": 1}}]}`)
	f.Add(`{"form": 1, "rows": [null]}`)
	f.Add(`{}{}`)
	f.Fuzz(func(t *testing.T, s string) {
		if r, err := Read(strings.NewReader(s)); err == nil {
			_ = WriteJSON(r, io.Discard)
		}
	})
}
