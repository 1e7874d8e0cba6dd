package differ

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// An ends is a writer that keeps the first and the last bytes: the dump of a crash begins
// with its cause and the goroutine that crashed.
type ends struct {
	mu         sync.Mutex
	head, tail []byte
	lost       int // bytes between them
}

// endSize is how many bytes of each end are kept.
const endSize = 16 << 10

func (w *ends) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := min(len(p), endSize-len(w.head))
	w.head = append(w.head, p[:n]...)
	w.tail = append(w.tail, p[n:]...)
	if more := len(w.tail) - endSize; more > 0 {
		w.tail = w.tail[more:]
		w.lost += more
	}
	return len(p), nil
}

func (w *ends) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lost == 0 {
		return string(w.head) + string(w.tail)
	}
	return fmt.Sprintf("%s\n[%d bytes are left out]\n%s", w.head, w.lost, w.tail)
}

// A long log keeps its first and its last bytes, whichever pieces it comes in.
func TestLongLogsKeepBothEnds(t *testing.T) {
	var text strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&text, "line %d\n", i)
	}
	for _, n := range []int{text.Len(), 2*endSize + 1, 2 * endSize, endSize, 1, 0} {
		for _, piece := range []int{1, 1000, endSize, 1 << 20} {
			var w ends
			for rest := text.String()[:n]; rest != ""; {
				k := min(piece, len(rest))
				_, err := w.Write([]byte(rest[:k]))
				require.NoError(t, err)
				rest = rest[k:]
			}
			want := text.String()[:n]
			if n > 2*endSize {
				want = fmt.Sprintf("%s\n[%d bytes are left out]\n%s", want[:endSize], n-2*endSize, want[n-endSize:])
			}
			require.Equal(t, want, w.String())
		}
	}
}
