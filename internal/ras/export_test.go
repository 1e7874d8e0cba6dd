package ras

import "time"

// AskPatiently is Ask with limits for a busy machine. An attempt to connect has the time of try.
func AskPatiently(addr string, try time.Duration) (*Answer, error) {
	return limits{all: time.Minute, try: try}.ask(addr)
}
