package analyze

import "time"

// AskRASWithin is AskRAS with limits for a busy machine. An attempt to connect has the time of try.
func AskRASWithin(addr string, try time.Duration) (*RASAnswer, error) {
	return rasLimits{all: time.Minute, try: try}.ask(addr)
}
