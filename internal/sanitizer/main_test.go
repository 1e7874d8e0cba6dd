package sanitizer_test

import (
	"log/slog"
	"os"
	"testing"
)

// The tests expect thousands of reports, and check them by Reports.
func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}
