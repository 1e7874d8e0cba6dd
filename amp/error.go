package amp

import "fmt"

// refuse returns the error of an operation that changed nothing.
func refuse(op, format string, args ...any) error {
	return fmt.Errorf("amp: %s: %w", op, fmt.Errorf(format, args...))
}
