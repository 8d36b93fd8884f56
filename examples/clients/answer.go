// Sends a photograph and prints the boxes in it. Only Go's standard library.
// Usage: go run answer.go http://127.0.0.1:8000 MODEL PHOTO.jpg [TOKEN]
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
)

type Answer struct {
	Error      string
	Detections []struct {
		Label string
		Score float64
		Box   [4]float64
	}
}

func main() {
	photo, err := os.Open(os.Args[3])
	if err != nil {
		log.Fatal(err)
	}
	defer photo.Close()
	address := fmt.Sprintf("%s/v2/models/%s/answer", os.Args[1], os.Args[2])
	request, err := http.NewRequest(http.MethodPost, address, photo)
	if err != nil {
		log.Fatal(err)
	}
	request.Header.Set("Content-Type", "image/jpeg")
	if len(os.Args) > 4 {
		request.Header.Set("Authorization", "Bearer "+os.Args[4])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		log.Fatal(err)
	}
	defer response.Body.Close()
	var answer Answer
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		log.Fatal(err)
	}
	if response.StatusCode != http.StatusOK {
		log.Fatal(answer.Error)
	}
	for _, detection := range answer.Detections {
		box := detection.Box
		fmt.Printf("%s %.2f %.0f %.0f %.0f %.0f\n", detection.Label, detection.Score, box[0], box[1], box[2], box[3])
	}
}
