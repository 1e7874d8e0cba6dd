package fabric

import (
	"fmt"

	"github.com/gochorus/chorus/device"
)

// Supports returns why r does not support an algorithm, the same on all ranks, or nil. The
// error matches errors.ErrUnsupported.
func (r *Rank) Supports(a Algorithm) error {
	if a != TwoShotLines || r.noLines == "" {
		return nil
	}
	return &device.UnsupportedError{Feature: a.String(), Need: "GPUs that NVLink joins, which keeps lines of 128 bytes whole", Have: r.noLines}
}

// missesLines returns the reason why lines between this rank and the others may be torn,
// according to the driver, or "" if they arrive whole.
func (r *Rank) missesLines(cards []card) (string, error) {
	p, err := r.dev.Properties()
	if err != nil {
		return "", err
	}
	if !keepsLines(p.Major, p.Minor) {
		return fmt.Sprintf("compute capability %d.%d on rank %d, and not 7.0, 8.0 or from 9.0 on", p.Major, p.Minor, r.rank), nil
	}
	for i := range cards {
		if i == r.rank || cards[i].GPU == cards[r.rank].GPU {
			continue
		}
		peer := r.seen(&cards[i])
		if peer == nil {
			return fmt.Sprintf("a link between ranks %d and %d that the driver does not tell of, since the process of rank %[1]d does not see the other GPU", r.rank, i), nil
		}
		if atomics, err := r.dev.PeerAtomics(peer); err != nil || !atomics {
			return fmt.Sprintf("another link between ranks %d and %d", r.rank, i), err
		}
	}
	return "", nil
}

// keepsLines reports whether GPUs of a compute capability write lines atomically. NCCL
// relies on it for the same GPUs.
func keepsLines(major, minor int) bool { return major >= 9 || major >= 7 && minor == 0 }

// firstOf returns the first non-empty string.
func firstOf(said []string) string {
	for _, s := range said {
		if s != "" {
			return s
		}
	}
	return ""
}
