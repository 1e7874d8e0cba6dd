package safe

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEndsEarly(t *testing.T) {
	for text, want := range map[string]bool{"": true, "{": true, `{"a"`: true, `{"a": [1,`: true, `{"a": "b`: true, `[1 2]`: false, `{"a": x}`: false} {
		d := json.NewDecoder(strings.NewReader(text))
		var err error
		for err == nil {
			d.More()
			_, err = d.Token()
		}
		require.Equal(t, want, EndsEarly(err), "%q: %v", text, err)
		var v any
		require.Equal(t, want, EndsEarly(json.NewDecoder(strings.NewReader(text)).Decode(&v)), "%q", text)
	}
	var v any
	require.True(t, EndsEarly(json.Unmarshal([]byte("{"), &v)))
	require.False(t, EndsEarly(nil))
}
