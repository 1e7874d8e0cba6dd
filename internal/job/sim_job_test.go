package job

import (
	"fmt"
)

// simName returns the name of a host, one letter.
func simName(i int) string { return "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[i : i+1] }

func nameOf(m Member) string { return fmt.Sprintf("%s/%d#%d", m.Host, m.LocalRank, m.PID) }
